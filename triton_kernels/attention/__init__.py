"""Exact attention in memory linear in the length: Dao et al., arXiv 2205.14135 and 2307.08691.

`scores.py` is what a score is, `segments.py` which rows a program has, `forward.py`, `backward.py` and `bias.py` are
the kernels, `tiles.py` their sizes, `launch.py` their launches.
"""
