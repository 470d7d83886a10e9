"""Run the `holdfast` command as `python -m holdfast`, even if the command is not on the PATH."""

from holdfast.cli import main

if __name__ == "__main__":
    main()
