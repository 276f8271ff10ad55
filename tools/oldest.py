"The oldest versions that the ranges of `settings.ini` promise, a line each: `python tools/oldest.py > oldest.txt`."
import re
from configparser import ConfigParser
from pathlib import Path

def oldest(requirements):
    "From 'torch>=2.6 numpy>=1.26' to 'torch==2.6.*' and so on."
    for name, version in re.findall(r'([\w\[\]-]+)>=([\d.]+)', requirements): yield f'{name}=={version}.*'

if __name__ == '__main__':
    ini = ConfigParser(delimiters=['='])
    ini.read(Path(__file__).resolve().parent.parent/'settings.ini', encoding='utf-8')
    print(*oldest(ini['DEFAULT']['requirements']), sep='\n')
