"""A group of commands whose error for a word that is none of them names those that could be meant."""

from __future__ import annotations

from difflib import get_close_matches

import click


class CommandGroup(click.Group):
    """A group of commands."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that the first word names."""
        word, names = args[0], self.list_commands(ctx)
        if word not in names and not word.startswith("-") and not ctx.resilient_parsing:
            meant = get_close_matches(word, names)
            known = f"did you mean {' or '.join(meant)}?" if meant else f"commands: {', '.join(names)}"
            ctx.fail(f"No such command {word!r}; {known}")
        return super().resolve_command(ctx, args)
