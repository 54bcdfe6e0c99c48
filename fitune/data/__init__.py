"""Text to token batches with known lengths: read, recognise, render with the chat template, batch. No torch here."""
