"""`python -m hotrow`."""

from hotrow.command_line import main

if __name__ == "__main__":
    main()
