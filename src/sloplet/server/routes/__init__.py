"""The routes of the HTTP API: each file translates one group of them to calls of the library."""
