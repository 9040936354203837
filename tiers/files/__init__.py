"""A tier of one file per record, for one engine or shared."""
