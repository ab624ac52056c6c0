"""`python -m crossdock` is the command `crossdock`."""

from crossdock.cli import main

if __name__ == "__main__":
    main()
