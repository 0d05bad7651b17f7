"""The microbenchmarks: one module with a `main` for each operator family. `halfstep bench --list` names them."""
