"""The commands: one file each, with a ``command``; imported only when called."""
