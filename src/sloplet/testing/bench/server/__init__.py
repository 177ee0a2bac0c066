"""``sloplet bench --server``: what it costs that sandboxes are a server's, over loopback, beside the same held here."""
