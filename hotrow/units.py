"""Numbers with units, for people."""


def in_units(num_bytes: int) -> str:
    """For example `1.50 GiB`."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if size == round(size) else f"{size:.2f} {unit}"


def counted(number: int, noun: str) -> str:
    """A number of things: `1 model`, `2 models`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
