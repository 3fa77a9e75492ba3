"""The King James Bible as one plain text file: the public-domain text that the demo model learns from.

    apt-get install bible-kjv
    python examples/kjv.py --out=.data/kjv.txt

Source: the Debian packages bible-kjv-text (the compressed text) and bible-kjv (the program ``bible``, which prints it); the
Bible Retrieval System by Chip Chapin, ported by Christoph Lameter, maintained in Debian.

Licence, as the packages' copyright file has it. Of the text: "The copyright for the King James Version text of the Bible is
expired since the translation was done in 1611". Of the data file: "provided for unrestricted use provided that this legend is
included"; "Users may copy, modify or distribute this file at will." Of the program: GPL version 2 or later; it is run here, and
no part of it reaches the file written.

Form of the file: ASCII; 1,189 chapters with an empty line between two; a chapter is a line with its book and number, then one
line per verse, without verse numbers:

    Genesis 1
    In the beginning God created the heaven and the earth.
    And the earth was without form, and void; and darkness was upon the face of the deep. ...
"""

import hashlib
import pathlib
import re
import subprocess

from absl import app, flags

NUM_BOOKS, NUM_CHAPTERS, NUM_VERSES = 66, 1189, 31102
HELD_OUT_STRIDE = 20

_VERSE = re.compile(r" +\d+ (.*)")
_HEADING = re.compile(r"(\S.*) \d+")


def read(program: str = "bible") -> str:
    """The whole text, in the form that the module's docstring shows.

    Args:
        program: name or path of Debian's ``bible``.

    Returns:
        The text, ending in a newline.

    Raises:
        FileNotFoundError: ``program`` is not installed.
        RuntimeError: ``program`` failed, or printed something other than the whole King James text.
    """
    # Pretty-printing names the books in full; no line is as long as this limit, so no verse is broken.
    command = [program, "-l", "100000", "gen1:1-rev22:21"]
    try:
        printed = subprocess.run(command, capture_output=True, text=True, encoding="ascii", check=True).stdout
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"the program {program!r}, which prints the King James text, is not installed: apt-get install bible-kjv"
        ) from error
    except subprocess.CalledProcessError as error:
        raise RuntimeError(
            f"{' '.join(command)!r} ended with status {error.returncode}: {(error.stderr or error.stdout).strip()!r}; "
            "its text comes with apt-get install bible-kjv-text"
        ) from error
    return _format(printed)


def _format(printed: str) -> str:
    """What ``bible`` prints (headings, numbered and indented verses, empty lines) -> chapters of one line per verse."""
    chapters: list[list[str]] = []
    for line in printed.splitlines():
        if verse := _VERSE.fullmatch(line):
            if not chapters:
                raise RuntimeError(f"the text starts with a verse, not with a chapter's heading: {line!r}")
            chapters[-1].append(" ".join(verse[1].split()))
        elif _HEADING.fullmatch(line):
            chapters.append([line])
        elif line:
            raise RuntimeError(f"neither a chapter's heading nor a numbered verse: {line!r}")
    got = (len({book_of(chapter[0]) for chapter in chapters}), len(chapters), sum(len(chapter) - 1 for chapter in chapters))
    if got != (NUM_BOOKS, NUM_CHAPTERS, NUM_VERSES):
        raise RuntimeError(f"(books, chapters, verses) is {got}, expected {(NUM_BOOKS, NUM_CHAPTERS, NUM_VERSES)}")
    return "\n\n".join("\n".join(chapter) for chapter in chapters) + "\n"


def book_of(heading: str) -> str:
    """The book of a chapter's heading: ``"1 Kings 3" -> "1 Kings"``."""
    return heading.rsplit(" ", 1)[0]


def split(text: str) -> tuple[str, str]:
    """Training and held-out text: every 20th chapter is held out, whole, so that no chapter stands on both sides.

    The choice depends on nothing but a chapter's place. What the Bible itself repeats (Kings and Chronicles, the first three
    Gospels) can stand on both sides: 7 of the 1,485 held-out verses also stand in the training text, word for word.

    Args:
        text: what ``read`` returned or the file that this program wrote.

    Returns:
        ``(train, held_out)``, each in the same form as ``text``.
    """
    chapters = text.rstrip("\n").split("\n\n")
    if len(chapters) != NUM_CHAPTERS:
        raise ValueError(f"text has {len(chapters)} chapters, expected {NUM_CHAPTERS}: pass the whole file that kjv.py writes")
    first = HELD_OUT_STRIDE // 2
    held_out = chapters[first::HELD_OUT_STRIDE]
    train = [chapter for place, chapter in enumerate(chapters) if place % HELD_OUT_STRIDE != first]
    return "\n\n".join(train) + "\n", "\n\n".join(held_out) + "\n"


def main(_: list[str]) -> None:
    try:
        text = read(flags.FLAGS.bible)
    except (FileNotFoundError, RuntimeError) as error:
        raise SystemExit(f"kjv.py: {error}") from error
    out = pathlib.Path(flags.FLAGS.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="ascii", newline="\n")
    train, held_out = split(text)
    print(f"{out}: {NUM_CHAPTERS:,} chapters, {NUM_VERSES:,} verses, {len(text):,} bytes")
    print(f"sha256 {hashlib.sha256(text.encode('ascii')).hexdigest()}")
    print(f"train {len(train):,} bytes, held out {len(held_out):,} bytes ({len(held_out) / len(text):.1%})")


if __name__ == "__main__":
    # Defined here, so that a program that imports this module may have flags of the same names.
    flags.DEFINE_string("out", ".data/kjv.txt", "File to write.")
    flags.DEFINE_string("bible", "bible", "Name or path of the program that prints the text (Debian package bible-kjv).")
    app.run(main)
