"""Two optimizers, and a teacher that follows the student by a momentum of the step. Its center is a plain tensor."""

from copy import deepcopy

import numpy as np
import torch
from parts import dataset, end, loader_of, net, replicas
from torch import nn
from torch.nn.functional import log_softmax, softmax

import toolkit

with toolkit.start() as run:
    student, head = replicas(net()), replicas(nn.Linear(2, 4))
    teacher, teacher_head = deepcopy(student.module).eval(), deepcopy(head.module)
    for parameter in (*teacher.parameters(), *teacher_head.parameters()):
        parameter.requires_grad_(False)
    body, top = torch.optim.AdamW(student.parameters(), 0.01), torch.optim.SGD(head.parameters(), 0.05, momentum=0.9)
    center = torch.zeros(4)
    momentum = np.linspace(0.9, 1.0, 200)
    run.resumable(
        student=student, head=head, teacher=teacher, teacher_head=teacher_head, body=body, top=top, center=center
    )
    loader = loader_of(dataset())
    for _ in run.epochs(6):
        for inputs, _ in run.steps(loader):
            with torch.no_grad():
                wanted = softmax((teacher_head(teacher(inputs)) - center) / 0.1, -1)
            loss = -(wanted * log_softmax(head(student(inputs + 0.1 * torch.randn_like(inputs))), -1)).sum(-1).mean()
            body.zero_grad()
            top.zero_grad()
            loss.backward()
            body.step()
            top.step()
            with torch.no_grad():
                for mine, theirs in ((student, teacher), (head, teacher_head)):
                    for ours, other in zip(mine.module.parameters(), theirs.parameters(), strict=True):
                        other.lerp_(ours, 1 - float(momentum[run.step]))
                center.lerp_(wanted.mean(0), 0.1)
            run.log(loss=loss)
    end(student=student, teacher=teacher, head=head)
