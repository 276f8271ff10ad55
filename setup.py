"Everything setuptools needs to know is read from `settings.ini`; what it makes on the way leaves no trace in the clone."
import atexit, re, shutil, sys, tempfile
from configparser import ConfigParser
from pathlib import Path
from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

root = Path(__file__).resolve().parent
sys.path.insert(0, str(root/'tools'))
import stubs

way = tempfile.mkdtemp() # the build folder, and the egg-info
atexit.register(shutil.rmtree, way, ignore_errors=True)

class WithStubs(build_py):
    "The modules, and beside them the stubs that show what `@patch` adds to classes."
    def run(self):
        super().run()
        if not self.editable_mode: stubs.write(Path(self.build_lib)/'phew_nb')

ini = ConfigParser(delimiters=['='])
ini.read(root/'settings.ini', encoding='utf-8')
cfg = ini['DEFAULT']
statuses = ['1 - Planning', '2 - Pre-Alpha', '3 - Alpha', '4 - Beta', '5 - Production/Stable', '6 - Mature', '7 - Inactive']
pythons = [f'3.{minor}' for minor in range(int(cfg['min_python'].split('.')[1]), 14)]
extras = {key.removesuffix('_requirements'): value.split() for key,value in cfg.items() if key.endswith('_requirements')}
readme = root/'README.md'

def absolute(text):
    "The README with links into the repository, as PyPI needs them: pages of files, and pictures as they are."
    def link(m): return f"{m[1]}{cfg['git_url']}/{'raw' if m[1][0] == '!' else 'blob'}/{cfg['branch']}/{m[2]}"
    return re.sub(r'(!?\[[^]]*\]\()(?!#|\w+:)([^)\s]+)', link, text)

setup(
    name=cfg['lib_name'], version=cfg['version'], description=cfg['description'], keywords=cfg['keywords'],
    author=cfg['author'], author_email=cfg['author_email'], url=cfg['git_url'], license='Apache-2.0',
    project_urls={'Documentation': cfg['doc_host'] + cfg['doc_baseurl'], 'Change log': f"{cfg['git_url']}/blob/{cfg['branch']}/CHANGELOG.md"},
    long_description=absolute(readme.read_text(encoding='utf-8')) if readme.exists() else cfg['description'],
    long_description_content_type='text/markdown',
    classifiers=[f'Development Status :: {statuses[int(cfg["status"])-1]}', f'Intended Audience :: {cfg["audience"]}',
                 f'Natural Language :: {cfg["language"]}', *(f'Programming Language :: Python :: {v}' for v in pythons)],
    packages=find_packages(include=['phew_nb', 'phew_nb.*']), package_data={'phew_nb': ['py.typed']},
    cmdclass=dict(build_py=WithStubs), options=dict(build=dict(build_base=way), egg_info=dict(egg_base=way)),
    python_requires=f'>={cfg["min_python"]}', install_requires=cfg['requirements'].split(), extras_require=extras,
    entry_points={'console_scripts': cfg['console_scripts'].split(),
                  'nbdev': [f'{cfg["lib_name"]}={cfg["lib_name"]}._modidx:d']},
    zip_safe=False)
