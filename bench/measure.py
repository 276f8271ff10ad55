"What the benchmarks share: the peak memory of a process, and waiting for a GPU."
import torch

def peak(device='cpu'):
    "Peak bytes of this process so far (`getrusage` would count the peak of the process that started it)."
    if str(device) != 'cpu': return torch.cuda.max_memory_allocated()
    with open('/proc/self/status') as f: return next(int(line.split()[1]) for line in f if line.startswith('VmHWM'))*1024

def wait(device):
    if str(device) != 'cpu': torch.cuda.synchronize()
