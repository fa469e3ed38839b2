"""The wire, sans-IO: frames (frame.py), messages (message.py), two body codecs (registry.py). See PROTOCOL.md."""
