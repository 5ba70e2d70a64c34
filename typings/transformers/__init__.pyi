# For pyright alone: the library's own types would have it read 2,600 files, a third of its time.
from typing import Any

def __getattr__(name: str) -> Any: ...
