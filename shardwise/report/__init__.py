"""What a plan and a run look like to people: terminal tables, pictures, one HTML page; and the doctor.

    notation    names, colours and units, shared by all below
    tables      a plan in the terminal or as plain text (`shardwise plan`)
    record      a run's folder, read back
    pictures    matplotlib figures of a plan and a run
    page        a run as one self-contained HTML page
    run         `write_report`: page and PNGs into the folder (`shardwise report`)

Only `pictures`, and with it `page` and `run`, loads matplotlib; nothing here loads torch to show a plan.
"""
