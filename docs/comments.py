"""Comments of fields as their documentation: those before a field, and the one behind it."""

import griffe


class FieldComments(griffe.Extension):
    """Gives a field of a class the comments that its author wrote beside it."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_) -> None:
        """Called for each attribute."""
        if attr.docstring or not attr.parent.is_class or not attr.lineno:
            return
        lines = attr.lines_collection[attr.filepath]
        before = []
        for line in reversed(lines[: attr.lineno - 1]):
            if not line.strip().startswith("# ") or line.strip().startswith("# ---"):
                break
            before.insert(0, line.strip().removeprefix("# "))
        behind = lines[attr.endlineno - 1].partition("  # ")[2].partition("  # type:")[0]
        text = " ".join([*before, behind]).strip().replace("][", "]\\[")  # two shapes are no link
        if text:
            attr.docstring = griffe.Docstring(text, parent=attr)
