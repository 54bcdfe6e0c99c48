"""One file a command; each has a `command`. `fitune.cli.main` lists them."""
