"""One module a command of `tepo-nemo`: its arguments, its help, and what it calls.

Each imports what it needs when it runs, so that the light commands stay light.
"""
