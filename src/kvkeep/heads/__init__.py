"""Which KV heads retrieve and which stream: an offline pass over synthetic text."""
