"""Work for ``lln bench gpu`` in processes of its own: compiling, checking, taking the time."""
