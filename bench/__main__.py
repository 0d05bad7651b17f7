"""`python -m halfstep.bench [--quick ...]` runs every bench with the same arguments."""

from halfstep.bench import activations, attention, cast, optimizer

if __name__ == "__main__":
    optimizer.main()
    cast.main()
    attention.main()
    activations.main()
