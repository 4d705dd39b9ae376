"""The command line. Commands are thin: what they do lives in functions that tests and other programs can call."""
