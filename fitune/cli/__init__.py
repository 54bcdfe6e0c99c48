"""The command line: parse, call, print. Each command is a file of `commands/`, imported only when it runs."""
