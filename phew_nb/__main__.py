"`python -m phew_nb COMMAND`, and the commands as they are installed: Ctrl-C while they are imported is one line."
import sys

def _of(name):
    "The command of this name, which is imported when it is called."
    def run():
        try:
            from phew_nb import cli
            return getattr(cli, name)()
        except KeyboardInterrupt: # `cli` has a line for its own
            print(f"{name.replace('main', 'phew_nb')}: interrupted", file=sys.stderr)
            return 130
    return run

phew_compare, phew_sweep, phew_prune, phew_report, main = map(_of, ('phew_compare', 'phew_sweep', 'phew_prune', 'phew_report', 'main'))

if __name__ == '__main__': sys.exit(main())
