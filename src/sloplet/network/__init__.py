"""What a sandbox may reach, decided on the host, by name: policy, inspection, relay, log."""
