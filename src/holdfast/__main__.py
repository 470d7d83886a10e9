"""`python -m holdfast` is the command, also where its folder is not on the path."""

from holdfast.cli import main

if __name__ == "__main__":
    main()
