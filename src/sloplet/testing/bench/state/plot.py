"""x"""


def draw(data: dict[str, object]) -> str:
    return ""
