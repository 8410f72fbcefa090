# run by __main__.py, with what `make test-web` installs
collect_ignore = ["browser.py", "explore.py"]
