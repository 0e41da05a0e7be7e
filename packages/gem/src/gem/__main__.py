"""`python -m gem`: the same as the command `gem`."""

from gem.cli import main

if __name__ == "__main__":
    main()
