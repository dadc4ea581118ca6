from fednormec.cli.main import main

main()
