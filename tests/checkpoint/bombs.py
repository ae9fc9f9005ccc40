"""Something that runs code when it is unpickled by plain pickle."""

from pathlib import Path


class Bomb:
    def __init__(self, crater):
        self.crater = crater

    def __reduce__(self):
        return Path.touch, (self.crater,)
