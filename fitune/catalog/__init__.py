"""Dated facts that ship with the package: GPUs, rentable instances and model shapes.

Plain Python over three data files (``gpus.csv``, ``clouds.csv``, ``models.json``); every row names its source and date.
Nothing here imports torch, and nothing is read before it is asked for.

    >>> from fitune.catalog import gpus, models
    >>> card, note = gpus.find("rtx3080")
    >>> shape = models.find("llama-3.1-8b")
"""
