"""Check a capsule network's routing and losses against the papers, and name the mistakes."""
from .conform import assert_conforms

__all__ = ["assert_conforms"]
