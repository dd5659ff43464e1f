"""Methods on equal terms: the same data, clients and seeds, settings chosen on held-out clients, one table."""

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """This package under a name that is also its function's."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        from ntkfl.compare.run import compare

        return compare(*arguments, **options)


sys.modules[__name__].__class__ = _Callable
