"""Reading an index in one walk at open."""
