"""What programs use: the application object, handlers, contexts, batches, bodies."""
