"""`python -m holdover`."""

from holdover.cli import main

if __name__ == "__main__":
    main()
