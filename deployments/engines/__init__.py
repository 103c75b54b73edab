"""Model engines behind one small protocol in token ids."""
