"""mqlayer inside web frameworks: one module for each, imported only by programs that use it."""
