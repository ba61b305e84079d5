"""Which part of a text belongs to which token."""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]  # ids to text


def pieces(ids: Sequence[int], text: str, decode: Decode) -> list[str]:
    """Returns the part of a text that each of its tokens adds. Together the parts are the text.

    Tokens cannot be decoded one by one: a tokenizer may drop the space before the first token, and several tokens may
    make up one character. So a part is what decoding gains by one more token. Text that cannot be assigned yet goes to
    a later token: the first after which it can, or the last.

    Args:
      ids: as sampled, without what ended them.
      text: of them.
      decode: ids to text.

    Returns:
      One text for each id.
    """
    texts = [""] * len(ids)
    place, start, done = 0, 0, 0  # in the text; decoded anew from `start`; known up to `done`
    for end in range(1, len(ids) + 1):
        known, more = decode(ids[start:done]), decode(ids[start:end])
        part = more[len(known) :]
        if more.startswith(known) and not part.endswith("\ufffd") and text.startswith(part, place):
            texts[end - 1], place, start, done = part, place + len(part), done, end
    if texts:
        texts[-1] += text[place:]
    return texts
