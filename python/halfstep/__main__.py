"""`python -m halfstep` is the `halfstep` command."""

from halfstep.cli import main

if __name__ == "__main__":
    main()
