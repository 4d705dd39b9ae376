"""The command line. Commands are thin: the work is done by functions that tests and other programs can call."""
