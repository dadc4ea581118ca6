from fednormec.cli import main

main()
