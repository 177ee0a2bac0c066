"""Programs that run INSIDE a sandbox and execute code cells there. Never imported: sent as text (see ``code``)."""
