"""Messages between engines, and the authenticated calls and servers that carry them."""
