"""Names of regions and kinds as a person reads them."""

KIND_WORDS = {
    "attention": "attention",
    "products": "other products",
    "elementwise": "norms, elementwise",
    "tables": "tables",
    "optimizer": "optimizer",
    "data": "data",
    "collectives": "collectives",
    "host gaps": "host gaps",
}


def region_words(name: str) -> str:
    """Shorten the qualified name of a module.

    Args:
        name: such as ``layers.0.streams.stream_clicks``.

    Returns:
        such as ``layer 1, clicks``; layers count from 1.
    """
    parts = name.split(".")
    if parts[0] == "layers" and len(parts) == 2:
        return f"layer {int(parts[1]) + 1}"
    if parts[0] == "layers" and len(parts) > 2:
        what = parts[-1].removeprefix("stream_") if "streams" in parts else parts[2]
        return f"layer {int(parts[1]) + 1}, {what}"
    if len(parts) > 1 and parts[-1].startswith("stream_"):
        return f"{parts[0]}, {parts[-1].removeprefix('stream_')}"
    return name
