"""`python -m crossdock` is the command `crossdock`."""

from crossdock.cli.app import main

if __name__ == "__main__":
    main()
