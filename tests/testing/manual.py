"""The pages of the manual as tests read them: blocks of code, names in the text, and command lines."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
from markdown_it import MarkdownIt

from hotrow.command_line import cli

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))

_MARKDOWN = MarkdownIt().enable("table")
_BLOCKS = MarkdownIt().enable("table").disable("inline")  # every test process reads the blocks of all pages


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the file it is saved as where it names one, and its text."""

    page: Path
    line: int
    language: str
    title: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """All blocks of a page in their order, those of lists included. Indented ones have no language."""
    found = []
    for token in _BLOCKS.parse(page.read_text(encoding="utf-8")):
        if token.type in {"fence", "code_block"}:
            language, _, rest = token.info.partition(" ")
            title = re.search(r'title="(.+?)"', rest)
            line = token.map[0] + 1 if token.map else 0
            found.append(Block(page, line, language, title[1] if title else "", token.content))
    return found


def code_spans(page: Path) -> Iterator[str]:
    """The text between backticks in the text and the tables of a page."""
    for token in _MARKDOWN.parse(page.read_text(encoding="utf-8")):
        yield from (child.content for child in token.children or () if child.type == "code_inline")


def shell_commands(script: str) -> list[list[str]]:
    """The words of each simple command, without pipes and redirections."""
    text = re.sub(r"(^|\s)#.*$", r"\1", script.replace("\\\n", " "), flags=re.MULTILINE)
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;>\n")
    lexer.whitespace_split, lexer.whitespace = True, " \t"
    commands: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set("|&;>\n"):
            commands.append([])
        else:
            commands[-1].append(word)
    return [words for words in commands if words]


def check_command_line(words: list[str]) -> None:
    """Parse the words after `hotrow` like the command line; ValueError names what does not exist.

    Nothing runs, and no file needs to exist.
    """
    context, words = _find(words)
    try:
        given, _, _ = context.command.make_parser(context).parse_args(list(words))
        for parameter in context.command.params:
            value = given.get(parameter.name)
            if parameter.required and value is None:
                raise click.MissingParameter(ctx=context, param=parameter)
            if isinstance(value, str | tuple | list) and not isinstance(parameter.type, click.Path):
                parameter.type_cast_value(context, value)
    except click.ClickException as error:
        raise ValueError(f"hotrow {context.info_name}: {error.format_message()}") from error


def check_mention(text: str) -> None:
    """The same for a command in a sentence, which may leave out words: the command and its options must exist."""
    context, words = _find(text.split()[1:])
    known = options(context.command)
    for option in re.findall(r"(?<![\w-])--?[a-z][\w-]*", " ".join(words).partition(" -- ")[0]):
        if option not in known:
            raise ValueError(f"hotrow {context.info_name} has no option {option}")


def _find(words: list[str]) -> tuple[click.Context, list[str]]:
    context = click.Context(cli, info_name="hotrow")
    while isinstance(context.command, click.Group) and words and not words[0].startswith("-") and words[0] != "…":
        found = context.command.get_command(context, words[0])
        if found is None:
            raise ValueError(f"hotrow has no command {words[0]!r}")
        context, words = click.Context(found, info_name=words[0], parent=context), words[1:]
    return context, words


def options(command: click.Command = cli) -> set[str]:
    """Every option of a command and of those below it."""
    context = click.Context(command)
    found = {text for option in command.get_params(context) for text in (*option.opts, *option.secondary_opts)}
    if isinstance(command, click.Group):
        below = (command.get_command(context, name) for name in command.list_commands(context))
        found.update(*(options(each) for each in below if each))
    return found
