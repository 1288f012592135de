"""`python -m hotrow`, and what the command `hotrow` runs."""

from hotrow.interrupts import end_at_once


def main() -> None:
    """Run the command line."""
    end_at_once()
    from hotrow.command_line import main as run

    run()


if __name__ == "__main__":
    main()
