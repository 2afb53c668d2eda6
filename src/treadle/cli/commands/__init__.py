"""The commands: one file each, with a ``command``; imported when it is called."""
