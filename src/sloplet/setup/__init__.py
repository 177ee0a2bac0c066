"""What stronger isolation needs: finding it (tools, facts), planning its installation (plan), doing it (perform)."""
