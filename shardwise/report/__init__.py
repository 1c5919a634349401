"""Reports of plans and runs: terminal tables, pictures, one HTML page.

    notation    names, colours and units, shared by all modules below
    tables      a plan in the terminal or as plain text (`shardwise plan`)
    record      reads a run's folder
    pictures    matplotlib figures of a plan and a run
    page        a run as one self-contained HTML page
    run         `write_report`: page and PNGs into the folder (`shardwise report`)

Only `pictures`, `page` and `run` load matplotlib. No module loads torch to show a plan.
"""
